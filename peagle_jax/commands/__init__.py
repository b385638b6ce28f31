"""The subcommands of `peagle`, a module each: `HELP`, `add_arguments(parser)`, `run(arguments)`."""
