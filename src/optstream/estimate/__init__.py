"""What streaming would cost a model that need not exist: the plan of `offload`, and arithmetic."""
