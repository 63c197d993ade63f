"""What stands behind the optimizer: its parameters, the loop over windows, loads and saves."""
