"""`qbe train`: what learned policies learn, from data and from records. Policies read the result (`policies.learned`)."""
