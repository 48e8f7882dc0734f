"""The benchmark harness: streams of tasks, runs, results, measures. Built on the library, never the other way round."""
