"""The custom ops: schema, fake implementation and which kernel serves which device."""
