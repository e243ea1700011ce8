"""`burnish view`: a local page for looking at runs and rollouts. Reads runs, and changes nothing in them but its index."""
