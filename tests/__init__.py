"""The tests. What they share is in `tests.harness`; `tests.leaks` watches each of them."""
