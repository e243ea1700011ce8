"""For tests that need several processes: start ranks over gloo, fork quickly, find ports, count what ranks send."""
