"""What the database of records tells: `tierline report`, and `tierline records export`."""
