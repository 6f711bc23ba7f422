"""`python -m minivllm`: the command line."""

from minivllm.cli import main

raise SystemExit(main())
