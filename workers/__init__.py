"""What runs inside one rank: the loop, the `Worker` base class, the process group and the bundled workers."""
