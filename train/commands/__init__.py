"""One module per `peagle-train` command: `add_arguments(parser)` and `run(args) -> int`."""
