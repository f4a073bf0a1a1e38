"""What stands in for a GPU, its driver, torch, a runner, or the time that passes."""
