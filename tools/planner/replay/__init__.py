"""``replay``: what a job gets done while nodes come and go, by a trace and under several policies."""
