"""The commands of ``het-plan``."""
