"""How the bundled models were made: their tasks, their training, and their evaluation on held-out questions.

python -m examples.training.train_chat              tiny-chat
python -m examples.training.train_diffusion         tiny-diffusion, from tiny-chat
python -m examples.training.train_vision            tiny-vision
"""
