"""From files to batches: rows, tokens and masks, order, and packing."""
