import sys

from streamclr.cli import main

sys.exit(main())
