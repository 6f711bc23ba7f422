from minivllm.__main__ import main

raise SystemExit(main())
