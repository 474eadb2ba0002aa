"""How a group of workers is started, driven, watched and stopped."""
