"""`medusa deploy` to AWS: SageMaker endpoints and Lambda functions, through boto3."""
