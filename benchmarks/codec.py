"""The one codec of all peers that bring none of their own: MessagePack.

One `Packer` a process, since a new one for each message costs more than the packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

pack: Callable[[Any], bytes] = msgpack.Packer().pack
unpack: Callable[[bytes], Any] = msgpack.unpackb
