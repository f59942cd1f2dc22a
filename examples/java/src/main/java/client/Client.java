package client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import slipstream.v1.GatewayServiceGrpc;
import slipstream.v1.GatewayServiceGrpc.GatewayServiceBlockingStub;
import slipstream.v1.GenerateRequest;
import slipstream.v1.ResumeRequest;
import slipstream.v1.SamplingOptions;

/**
 * A client of Slipstream's gateway: it generates, resumes from the middle, and reads an error.
 *
 * <p>Usage: Client HOST:PORT. docs/grpc.md says how its stubs are made, and why it is set up as it is.
 */
public final class Client {
  private static final String SERVICE = "slipstream.v1.GatewayService";

  /** Gateways that do not serve get no calls. Only calls that change nothing are tried again: a Generate is resumed. */
  private static final Map<String, ?> SERVICE_CONFIG =
      Map.of(
          "loadBalancingConfig", List.of(Map.of("round_robin", Map.of())),
          "healthCheckConfig", Map.of("serviceName", SERVICE),
          "methodConfig",
              List.of(
                  Map.of(
                      "name",
                          List.of(
                              Map.of("service", SERVICE, "method", "ListModels"),
                              Map.of("service", SERVICE, "method", "GetSession"),
                              Map.of("service", SERVICE, "method", "Tokenize")),
                      "retryPolicy",
                          Map.of(
                              "maxAttempts", 4.0,
                              "initialBackoff", "0.2s",
                              "maxBackoff", "2s",
                              "backoffMultiplier", 2.0,
                              "retryableStatusCodes", List.of("UNAVAILABLE")))));

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel =
        Grpc.newChannelBuilder(arguments[0], InsecureChannelCredentials.create())
            .defaultServiceConfig(SERVICE_CONFIG)
            .enableRetry()
            .build();
    GatewayServiceBlockingStub gateway = GatewayServiceGrpc.newBlockingStub(channel);
    List<Integer> tokens = new ArrayList<>();
    StringBuilder text = new StringBuilder();
    String session = generate(gateway, tokens, text);
    System.out.println("text " + tokens.size() + " " + text);
    System.out.println("rest " + resume(gateway, session, tokens.size() / 2));
    System.out.println("error " + refused(gateway));
    channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
  }

  /** The deadline is of the call. The session lives on, and a Resume takes it up. */
  private static GatewayServiceBlockingStub timed(GatewayServiceBlockingStub gateway) {
    return gateway.withDeadlineAfter(60, TimeUnit.SECONDS);
  }

  private static String generate(GatewayServiceBlockingStub gateway, List<Integer> tokens, StringBuilder text) {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setPrompt("def read(self, path):")
            .setMaxTokens(24)
            .setSampling(SamplingOptions.newBuilder().setTemperature(0))
            .build();
    String[] session = {""};
    // Waits while no gateway is there, as long as the deadline allows.
    timed(gateway)
        .withWaitForReady()
        .generate(request)
        .forEachRemaining(
            event -> {
              if (event.hasStarted()) {
                session[0] = event.getStarted().getSessionId();
              }
              tokens.addAll(event.getDelta().getTokenIdsList());
              text.append(event.getDelta().getText());
            });
    return session[0];
  }

  /** What follows the first tokens of a session. */
  private static String resume(GatewayServiceBlockingStub gateway, String session, int offset) {
    ResumeRequest request = ResumeRequest.newBuilder().setSessionId(session).setOffset(offset).build();
    StringBuilder text = new StringBuilder();
    timed(gateway).resume(request).forEachRemaining(event -> text.append(event.getDelta().getText()));
    return text.toString();
  }

  /** The reason, the field and a number of an error. */
  private static String refused(GatewayServiceBlockingStub gateway) throws InvalidProtocolBufferException {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setPrompt("Hi")
            .setSampling(SamplingOptions.newBuilder().setTemperature(-1))
            .build();
    String reason = "", field = "", most = "";
    try {
      timed(gateway).generate(request).next();
      return "";
    } catch (StatusRuntimeException error) {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          reason = info.getReason();
          most = info.getMetadataOrDefault("most", "");
        } else if (detail.is(BadRequest.class)) {
          field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
        }
      }
      return String.join(" ", error.getStatus().getCode().name(), reason, field, most);
    }
  }

  private Client() {}
}
