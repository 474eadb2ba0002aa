"""What the real one tells its friends."""

import os


def is_lazy() -> bool:
    """Tell whether operations are recorded first: where nothing is said, in this release."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"
