// A client of Slipstream's gateway: it generates, resumes from the middle, and reads an error.
//
// Usage: client HOST:PORT. docs/grpc.md says how its stubs are made, and why it is set up as it is.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // checks the health that the service configuration names
	"google.golang.org/grpc/status"

	slipstream "example.com/client/slipstreamv1"
)

// Gateways that do not serve get no calls. Only calls that change nothing are tried again: a Generate is resumed.
const serviceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": "slipstream.v1.GatewayService"},
  "methodConfig": [{
    "name": [
      {"service": "slipstream.v1.GatewayService", "method": "ListModels"},
      {"service": "slipstream.v1.GatewayService", "method": "GetSession"},
      {"service": "slipstream.v1.GatewayService", "method": "Tokenize"}
    ],
    "retryPolicy": {
      "maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "2s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

func main() {
	channel, err := grpc.NewClient(
		os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(serviceConfig),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	gateway := slipstream.NewGatewayServiceClient(channel)
	// The deadline is of this call. The session lives on, and a Resume takes it up.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	session, tokens, text := generate(ctx, gateway)
	fmt.Println("text", len(tokens), text)
	fmt.Println("rest", resume(ctx, gateway, session, len(tokens)/2))
	fmt.Println("error", refused(ctx, gateway))
}

func generate(ctx context.Context, gateway slipstream.GatewayServiceClient) (string, []uint32, string) {
	maxTokens, temperature := uint32(24), 0.0
	request := &slipstream.GenerateRequest{
		Input:     &slipstream.GenerateRequest_Prompt{Prompt: "def read(self, path):"},
		MaxTokens: &maxTokens,
		Sampling:  &slipstream.SamplingOptions{Temperature: &temperature},
	}
	// Waits while no gateway is there, as long as the deadline allows.
	stream, err := gateway.Generate(ctx, request, grpc.WaitForReady(true))
	if err != nil {
		log.Fatal(err)
	}
	session, text, tokens := "", "", []uint32{}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return session, tokens, text
		}
		if err != nil {
			log.Fatal(err)
		}
		switch {
		case event.GetStarted() != nil:
			session = event.GetStarted().SessionId
		case event.GetDelta() != nil:
			text += event.GetDelta().Text
			tokens = append(tokens, event.GetDelta().TokenIds...)
		}
	}
}

// What follows the first tokens of a session.
func resume(ctx context.Context, gateway slipstream.GatewayServiceClient, session string, offset int) string {
	stream, err := gateway.Resume(ctx, &slipstream.ResumeRequest{SessionId: session, Offset: uint32(offset)})
	if err != nil {
		log.Fatal(err)
	}
	text := ""
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return text
		}
		if err != nil {
			log.Fatal(err)
		}
		text += event.GetDelta().GetText()
	}
}

// The reason, the field and a number of an error.
func refused(ctx context.Context, gateway slipstream.GatewayServiceClient) string {
	temperature := -1.0
	stream, err := gateway.Generate(ctx, &slipstream.GenerateRequest{
		Input:    &slipstream.GenerateRequest_Prompt{Prompt: "Hi"},
		Sampling: &slipstream.SamplingOptions{Temperature: &temperature},
	})
	if err == nil {
		_, err = stream.Recv()
	}
	found := status.Convert(err)
	reason, field, most := "", "", ""
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason, most = detail.Reason, detail.Metadata["most"]
		case *errdetails.BadRequest:
			field = detail.FieldViolations[0].Field
		}
	}
	return fmt.Sprint(found.Code(), " ", reason, " ", field, " ", most)
}
