"""The model as ONNX files, for runtimes without PyTorch. docs/onnx.md says what is in them."""

from prism_match.export.onnx.write import OnnxOptions, export_onnx

__all__ = ["OnnxOptions", "export_onnx"]
