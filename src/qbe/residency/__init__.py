"""Which slices of which sites are on the device, where not all of them fit there."""
