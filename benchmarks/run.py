"""The entry point: `python -m benchmarks.run`, from the root of a checkout.

A spawned worker imports this module again, as `__mp_main__`: it imports nothing, so that no worker pays for the command
line's libraries or carries their threads.
"""

if __name__ == "__main__":
    from benchmarks.cli import app

    app(prog_name="python -m benchmarks.run")
