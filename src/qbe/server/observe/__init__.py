"""What a server says about itself: metrics, traces, logs. Prompts and answers are in none of them unless asked for."""
