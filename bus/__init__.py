"""The bus: sockets, frames, MessagePack, sequence numbers and liveness arithmetic.

Nothing here knows of torch, of processes or of models.
"""
