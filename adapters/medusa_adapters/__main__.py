"""``python -m medusa_adapters``: the command `medusa`, also where its script is not on the PATH."""

import sys

from .cli.main import main

sys.exit(main())
