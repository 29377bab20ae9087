"""What a request may ask for beside plain decoding, each in a file of its own (`qbe.engine.extensions.extension`)."""
