"""``het-plan profile``: measures layers and links of this machine."""
