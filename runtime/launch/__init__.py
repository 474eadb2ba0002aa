"""How the processes of a group are started."""
