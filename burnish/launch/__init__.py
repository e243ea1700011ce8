"""Start the processes of a run, restart them when one dies, and fit the run to the devices that are left."""
