"""Steps of recurrent layers."""
