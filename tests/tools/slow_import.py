"""For the fork server to preload: an import that does not end."""

import time

time.sleep(600)
