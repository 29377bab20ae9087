"""`qbe train`: learns from data or records what policies read (`qbe.policies.learned`)."""
