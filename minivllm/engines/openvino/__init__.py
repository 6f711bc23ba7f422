"""engine=openvino: OpenVINO GenAI in its own interpreter."""
