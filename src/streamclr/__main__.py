import sys

from streamclr.cli.entry import main

sys.exit(main())
