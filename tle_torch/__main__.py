"""python -m tle_torch"""

import sys

from tle_torch.cli import main

sys.exit(main())
