"""The main job of `optstream train`: a language model on text, its optimizer's state streamed."""
