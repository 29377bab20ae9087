"""When an answer is hard, and when that is cause for another blueprint."""
