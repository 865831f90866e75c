"""The attention context exchange on a rank (SlimPipe, section 4.2)."""
