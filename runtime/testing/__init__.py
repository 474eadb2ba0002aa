"""Faults for an embedder's own tests; `stepcast.testing` has the public names.

Nothing is imported here: pytest loads the plugin, which is in here, at each of its starts.
"""
