"""Every peer on the same work in one run: `python -m benchmarks.run`, from the root of a checkout."""
