"""`tierline report` and `tierline records export`."""
