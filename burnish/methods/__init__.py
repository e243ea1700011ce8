"""The methods: what a run learns or measures, from rows to updates. `Method` is in `burnish.method`."""
