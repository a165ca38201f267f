"""The parts of the demonstration: a checkpoint whose every element is unique, a reference model, and a witness that counts."""
