"""What serving costs in joules, measured where the machine measures it, and a budget that shifts the default tier."""
