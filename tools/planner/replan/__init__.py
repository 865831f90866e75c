"""``het-plan replan``: from what a run measured to a better plan, and what that would gain."""
