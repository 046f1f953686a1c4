"""One module an experiment: its parameters, its function, its result. `lab.<experiment>` finds the function."""
