"""What TensorFlow's estimators do, case by case; they need TensorFlow 2.15 and never run in the tests."""
