"""Yesterday's traffic under another policy: `tierline replay`, and why a request went where it went: `tierline explain`."""
