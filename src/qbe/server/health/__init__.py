"""Live quality: answers scored in idle steps, detectors of what goes wrong, and the ladder of actions against it."""
