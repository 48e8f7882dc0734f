"""One run, a sweep of runs, a search: from a config to a result file."""
